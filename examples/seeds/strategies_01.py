from unspool import AutoModelForCausalLM, AutoTokenizer

my_model = AutoModelForCausalLM.from_pretrained("models/gpt2")
inputs = AutoTokenizer.from_pretrained("models/gpt2")("The sea is", return_tensors="pt")
my_model.generate(**inputs, num_beams=4, do_sample=True)
