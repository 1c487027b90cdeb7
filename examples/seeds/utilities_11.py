from unspool import AutoTokenizer, AutoModelForCausalLM
import torch

model = AutoModelForCausalLM.from_pretrained("models/gpt2")
tokenizer = AutoTokenizer.from_pretrained("models/gpt2")

inputs = tokenizer("A sequence: 1, 2, 3", return_tensors="pt")

# By default, the scores are not normalized -- the sum of their exponentials is NOT a normalized probability
# distribution, summing to 1
outputs = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
print(torch.allclose(torch.sum(torch.exp(outputs.scores[-1])), torch.Tensor((1.000,)), rtol=1e-4))

# Normalizing them may have a positive impact on beam methods, or when using the scores on your application
outputs = model.generate(**inputs, renormalize_logits=True, return_dict_in_generate=True, output_scores=True)
print(torch.allclose(torch.sum(torch.exp(outputs.scores[-1])), torch.Tensor((1.000,)), rtol=1e-4))
