from unspool import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
model.generation_config
