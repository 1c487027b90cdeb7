import torch
from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama", torch_dtype=torch.float16).to("cpu")
assistant_model = AutoModelForCausalLM.from_pretrained("models/llama_draft", torch_dtype=torch.float16).to("cpu")
inputs = tokenizer("Hugging Face is an open-source company", return_tensors="pt").to("cpu")

outputs = model.generate(**inputs, assistant_model=assistant_model, max_new_tokens=20, prompt_lookup_num_tokens=5)
tokenizer.batch_decode(outputs, skip_special_tokens=True)
