from unspool import pipeline
import torch

pipe = pipeline(
    "text-generation",
    model="models/llama",
    assistant_model="models/llama_draft",  # This extra line is all that's needed, also works with UAD
    torch_dtype=torch.bfloat16
)
pipe_output = pipe("Once upon a time, ", max_new_tokens=50, do_sample=False)
pipe_output[0]["generated_text"]
