"""Make the models of this folder with `transformers`, or write the logits of another model next to it.

    python tests/data/huggingface/make.py              # random models in llama/, qwen2/ and gpt2/
    python tests/data/huggingface/make.py FOLDER       # FOLDER/logits.npz, of any causal language model

It needs torch, transformers and safetensors, in an environment of its own. The models were made with transformers 5.24.0.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZE = dict(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)


def make(folder: pathlib.Path, model: transformers.PreTrainedModel, dtype: torch.dtype) -> None:
    """Save a model with random norms and biases."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.3)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def write_logits(folder: pathlib.Path) -> None:
    """Write tokens and the logits that the model in a folder computes in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens_BxT = np.random.default_rng(0).integers(0, 256, (2, 12))
    with torch.no_grad():
        logits_BxTxV = model(torch.tensor(tokens_BxT)).logits.numpy()
    np.savez_compressed(folder / "logits.npz", tokens=tokens_BxT.astype(np.int32), logits=logits_BxTxV)


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1:]:
        write_logits(pathlib.Path(sys.argv[1]))
        sys.exit()
    llama = transformers.LlamaConfig(**SIZE, rms_norm_eps=1e-5, rope_theta=500.0)
    make(HERE / "llama", transformers.LlamaForCausalLM(llama), torch.float32)
    qwen2 = transformers.Qwen2Config(**SIZE, rms_norm_eps=1e-6, rope_theta=1000.0, tie_word_embeddings=True)
    make(HERE / "qwen2", transformers.Qwen2ForCausalLM(qwen2), torch.bfloat16)
    sizes = dict(
        vocab_size=256,
        n_embd=16,
        n_inner=24,
        n_head=4,
        n_layer=2,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    make(HERE / "gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.float32)
    for name in ("llama", "qwen2", "gpt2"):
        write_logits(HERE / name)
