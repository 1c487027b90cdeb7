import torch, unspool
from unspool.cache import SinkCache
from tests.conformance.cases import load_model
torch.manual_seed(0)
m=load_model("llama").model
V=m.info.vocab_size
ids=torch.randint(3,V,(3,30)); mask=torch.ones_like(ids); mask[0,:11]=0; mask[1,:25]=0
ref=unspool.generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=25)
out=unspool.generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=25,cache_implementation="sink",cache_config=dict(window_length=60,num_sink_tokens=4))
print(torch.equal(ref,out))
# chunk independence and naive definition
W,S=16,3
long=torch.randint(3,V,(1,200))
def run(chunks):
    c=SinkCache(W,S); outs=[]; first=0
    it=iter(chunks)
    while first<200:
        n=min(next(it),c.longest_pass,200-first)
        outs.append(m.forward(long[:,first:first+n],c,want=unspool.protocols.Want("all")).logits); first+=n
    return torch.cat(outs,1)
import itertools, unspool.protocols
a=run(itertools.repeat(1)); b=run(itertools.repeat(50)); c=run(itertools.cycle([3,1,7,20]))
print((a-b).abs().max(),(a-c).abs().max(), a.abs().max())
# short first 16 equals full
full=m(long[:,:40]).logits
print((full[:,:16]-a[:,:16]).abs().max(), (full[:,16:40]-a[:,16:40]).abs().max())
for name in ("bloom","gemma2","mistral","phi"):
    m2=load_model(name).model
    o=unspool.generate(m2,input_ids=ids%m2.info.vocab_size,attention_mask=mask,max_new_tokens=300,cache_implementation="sink",cache_config=dict(window_length=20,num_sink_tokens=4), eos_token_id=None)
    print(name,o.shape)
    o2=unspool.generate(m2,input_ids=(ids%m2.info.vocab_size)[:1,11:],max_new_tokens=300,cache_implementation="sink",cache_config=dict(window_length=20,num_sink_tokens=4), eos_token_id=None)
    print(torch.equal(o[0,11:],o2[0]))
