import torch
from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama", torch_dtype=torch.float16).to("cpu")
inputs = tokenizer("What is the highest peak in the world?", return_tensors="pt").to("cpu")

outputs = model.generate(**inputs, max_new_tokens=50, dola_layers=[1,2], do_sample=False, repetition_penalty=1.2)
tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[-1]:], skip_special_tokens=True)
