import torch
from tests.fakes import FakeModel
from unspool.api.calls import generate, stream

def slow(model, ids, n, eos=()):
    ids=list(ids)
    out=[]
    for _ in range(n):
        w=torch.tensor([0.5**(len(ids)-1-i) for i in range(len(ids))])
        l=(w[:,None]*model.table[torch.tensor(ids)]).sum(0)
        t=int(l.argmax()); ids.append(t); out.append(t)
        if t in eos: break
    return out

def test_greedy():
    m=FakeModel()
    rows=[[1,2,3],[4,5,6,7,8],[9]]
    W=5
    ids=torch.tensor([[0]*(W-len(r))+r for r in rows]); mask=torch.tensor([[0]*(W-len(r))+[1]*len(r) for r in rows])
    out=generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=12,eos_token_id=[3,7],pad_token_id=0)
    for r,o in zip(rows,out.tolist()):
        want=slow(m,r,12,(3,7)); assert o[W:W+len(want)]==want, (o,want); assert all(t==0 for t in o[W+len(want):])
    for kw in [dict(use_cache=False),dict(cache_implementation="static"),dict(prefill_chunk_size=2),dict(return_dict_in_generate=True)]:
        o2=generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=12,eos_token_id=[3,7],pad_token_id=0,**kw)
        o2=o2 if isinstance(o2,torch.Tensor) else o2.sequences
        assert torch.equal(out,o2),kw
    o=generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=5,do_sample=True,seed=[1,2,3],num_return_sequences=3, top_k=0,eos_token_id=None)
    assert o.shape==(9,10)
    one=generate(m,input_ids=torch.tensor([rows[2]]),max_new_tokens=5,do_sample=True,seed=3,num_return_sequences=3,top_k=0)
    assert torch.equal(one[:,1:],o[6:,5:])
    d=generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=3,return_dict_in_generate=True,output_scores=True,output_hidden_states=True,output_attentions=True,logprobs=2,eos_token_id=None)
    print([h[0].shape for h in d.hidden_states],[a[0].shape for a in d.attentions]); print(d.logprobs[0][0]); print(d.stats)
    d=generate(m,input_ids=ids,attention_mask=mask,max_new_tokens=3,return_dict_in_generate=True,prompt_logprobs=1)
    print(d.prompt_logprobs[0]); 
