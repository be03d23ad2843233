import pathlib
def ed(f,*prs):
    p=pathlib.Path(f); s=p.read_text()
    for a,b in prs:
        assert s.count(a)==1,(f,a,s.count(a)); s=s.replace(a,b)
    p.write_text(s)
ed("docs/guides/runs.md",
("| in `eval` rows of pipelines with compressed activations: loss with the compression |","| pipelines with compressed activations: `eval` loss with compression |"),
("| in elastic runs: current number of workers; batches consumed by all workers |","| elastic runs: current workers; batches consumed by all |"),
("loss, in nats/byte |","loss |"),
("The same command continues the run:","The same command continues it:"),
("(which changes results by rounding)","(changes rounding)"),
("so set `steps` higher than in the source run.","so set higher `steps`."),
("prints a message, renames it to `STEP.damaged`, and continues from the previous one","renames it to `STEP.damaged` with a message, continues from the previous one"),
("Bytes are read from the compiled program, or for simulated workers computed from the method.","Bytes come from the compiled program, or for simulated workers from the method."),
("the error names the older step to continue from if you move this one away","the error names an older step to continue from after moving it away"),
("(a closed terminal, unless","(closed terminal, unless"),
("a run finishes the current step, saves","a run finishes the step, saves"),
)
