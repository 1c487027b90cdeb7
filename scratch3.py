import torch, unspool, time
lm=unspool.load()
p=lm.prefix("You are a pirate. You answer every question in one short sentence, and you say arr.", chat=True)
print(p)
for q in ("What is the sea?","Who are you?"):
    a=p.generate(q,chat=True,max_new_tokens=24); b=lm.generate([*p.messages,{"role":"user","content":q}],max_new_tokens=24)
    print(a.text==b.text, repr(a.text))
t=lm.prefix("The capital of France is")
a=t.generate([" Paris, and"," a city of","x"],max_new_tokens=10)
ids=[t.token_ids+lm.tokenizer.encode(x,add_special_tokens=False) for x in (" Paris, and"," a city of","x")]
b=lm.generate(ids,max_new_tokens=10)
print(a.texts==b.texts,a.texts)
a=t.generate(" Paris, and",max_new_tokens=10,num_beams=3); b=lm.generate(ids[0],max_new_tokens=10,num_beams=3); print(a.text==b.text)
a=t.generate([" Paris, and","x"],max_new_tokens=10,do_sample=True,seed=5,num_return_sequences=2); b=lm.generate([ids[0],ids[2]],max_new_tokens=10,do_sample=True,seed=5,num_return_sequences=2); print(a.texts==b.texts)
t.save("/tmp/w/p.safetensors"); t2=lm.load_prefix("/tmp/w/p.safetensors"); print(t2, t2.generate(" Paris, and",max_new_tokens=10).text==t.generate(" Paris, and",max_new_tokens=10).text)
s=lm.prefix("The capital of France is",cache_implementation="sink",cache_config={"window_length":64,"num_sink_tokens":4})
print(s.generate(" Paris",max_new_tokens=10).text)
