from unspool import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/llama")
model = AutoModelForCausalLM.from_pretrained("models/llama")
assistant_model = AutoModelForCausalLM.from_pretrained("models/llama_draft")
inputs = tokenizer("Hugging Face is an open-source company", return_tensors="pt")

outputs = model.generate(**inputs, assistant_model=assistant_model)
tokenizer.batch_decode(outputs, skip_special_tokens=True)
