import torch
from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
inputs = tokenizer("Hugging Face is an open-source company", return_tensors="pt").to("cpu")

model = AutoModelForCausalLM.from_pretrained("models/llama", torch_dtype=torch.float16).to("cpu")
# explicitly set to 100 because Llama2 generation length is 4096
outputs = model.generate(**inputs, max_new_tokens=50, num_beams=6, num_beam_groups=3, diversity_penalty=1.0, do_sample=False)
tokenizer.batch_decode(outputs, skip_special_tokens=True)
