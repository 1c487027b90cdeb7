import torch
from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama", torch_dtype=torch.float16).to("cpu")
inputs = tokenizer("What is the highest peak in the world??", return_tensors="pt").to("cpu")

outputs = model.generate(**inputs, max_new_tokens=50, dola_layers="high", do_sample=False)
tokenizer.batch_decode(outputs, skip_special_tokens=True)
