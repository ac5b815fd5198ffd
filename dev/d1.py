import torch, sys, time, itertools
from cosformer import attention, linear_attention
import cosformer.ops.fused as F
torch.manual_seed(0)
def run(f,ins,impl,dt):
    xs=[x.to(dt).detach().requires_grad_() for x in ins]
    o=f(*xs,impl=impl); os_=[o]
    g=torch.Generator(device="cuda").manual_seed(1)
    cot=[torch.randn(x.shape,generator=g,dtype=torch.float64,device="cuda").to(dt).to(x.dtype) for x in os_]
    return [*os_,*torch.autograd.grad(os_,xs,cot)]
def plain(q,k,v,dt):
    pass
def cmp(name,f,ins,dts=(torch.float32,torch.bfloat16,torch.float16)):
    for dt in dts:
        xs=[x.to(dt).double() for x in ins]
        e=run(f,xs,"reference",torch.float64)
        try: t=run(f,ins,"triton",dt)
        except Exception as ex:
            print(name,dt,"FAIL",type(ex).__name__,str(ex)[:300]); continue
        c=run(f,ins,"chunked",dt)
        r=["%.0e/%.0e"%(((a-b).norm()/a.norm()).item(),((a-d).norm()/a.norm()).item()) for a,b,d in zip(e,t,c)]
        print(name,str(dt)[6:],*r,flush=True)
def tok(B=1,H=2,T=1000,S=None,Hk=None,D=64,V=64):
    S=S or T; Hk=Hk or H
    return [torch.randn(B,H,T,D,device="cuda").double(),torch.randn(B,Hk,S,D,device="cuda").double(),torch.randn(B,Hk,S,V,device="cuda").double()]
P=lambda **k:(lambda q,kk,v,impl:attention(q,kk,v,impl=impl,**k))
def graph_time(f,n=20):
    f(); f(); torch.cuda.synchronize()
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s): f(); f()
    torch.cuda.current_stream().wait_stream(s)
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    g.replay(); torch.cuda.synchronize()
    ts=[]
    for _ in range(n):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[n//2]
def kernels(q,k,v,causal):
    """forward op, and backward op alone"""
    from cosformer.ops.problem import basis
    T=q.shape[2]; pos=torch.arange(T,dtype=torch.float64,device="cuda")[None]; th=torch.full((1,1),3.14159265/2/T,dtype=torch.float64,device="cuda")
    ps=basis(pos,th,"cosine",torch.float32)
    a=(None,None,None,ps,ps,None)
    out,total,last=F.fused_forward(q,k,v,*a,causal,"relu","clamp",1e-6)
    g=torch.randn_like(out)
    return (lambda:F.fused_forward(q,k,v,*a,causal,"relu","clamp",1e-6)),(lambda:F.fused_backward(q,k,v,*a,out,total,g,None,causal,"relu","clamp",1e-6))
CELLS=[(8,16,1024,64),(8,16,2048,64),(8,16,4096,64),(2,16,16384,64),(1,16,65536,64),(2,8,16384,128)]
def floor(c,n=4): B,H,N,D=c; return n*B*H*N*D*2/4.27e12*1e3
if __name__=="__main__":
    cmp("causal",P(causal=True),tok()); cmp("causal 63",P(causal=True),tok(T=63)); cmp("bi",P(),tok(T=1000,S=777)); cmp("gqa",P(causal=True),tok(H=4,Hk=2,D=40,V=96))
    cmp("128",P(causal=True),tok(D=128,V=128)); cmp("256",P(causal=True),tok(D=256,V=256)); cmp("4097 long",P(causal=True),tok(T=4097,H=1))
    cmp("retention",lambda q,k,v,impl:linear_attention(q,k,v,causal=True,gamma=torch.tensor([.9,.999],device="cuda"),normaliser="none",impl=impl),tok())
    m=torch.rand(1,1000,device="cuda")>.3; cu=torch.tensor([0,5,5,500,1000],device="cuda")
    cmp("mask",P(causal=True,key_mask=m),tok()); cmp("packed",P(causal=True,cu_seqlens=cu),tok())
    for c in CELLS:
        q,k,v=(torch.randn(*c,device="cuda",dtype=torch.bfloat16) for _ in range(3))
        for causal in (True,False):
            fw,bw=kernels(q,k,v,causal)
            f=floor(c); a=graph_time(fw); b=graph_time(bw)
            print(c,"causal" if causal else "full","fwd %.3f ms %.1fx | bwd %.3f both %.1fx of 3 floors"%(a,a/f,b,(a+b)/(3*f)),flush=True)
