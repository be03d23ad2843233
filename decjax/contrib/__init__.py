"""Parts that few runs need, imported only when a config or command asks for them.

Methods
    corrections    for workers with different data: gradient tracking, exact diffusion, D², quasi-global momentum, DecentLaM
    outer          variants of DiLoCo: SlowMo, outer steps between neighbors, Streaming DiLoCo
    onebit         1-bit Adam and 0/1 Adam
    subnetworks    independent subnetwork training
Messages
    mixers         push-sum, accelerated gossip, consensus control, PowerGossip, RelaySGD, asynchronous gossip
    random_graphs  topologies that are drawn at random
    codecs         ZFP, errors within a bound, bits behind an entropy coder
    demo           DeMo: reducer, codec and optimizer
    dion           Dion: reducer and optimizer
    gravac         GraVAC: a reducer that changes its codec
    tensor_sums    coded sums of a tensor-parallel group
    selective      how many stages of a pipeline compress
    late           pipelines whose stages do not wait
    probe          errors of messages between stages
    overlap        what a compiled step computes while a message travels
Tasks, with their models
    images         digits and CIFAR-10
    translation    parallel text
    clicks         click-through prediction, with divided embedding tables
    graphs         nodes of a graph
    quadratics     quadratics with known optimum
Clusters and models
    layouts        workers × pipeline stages × tensor-parallel devices in the cost model
    placement      which device does what where links differ
    compress       compression of trained weights
"""
