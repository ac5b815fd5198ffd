import sys; sys.path.insert(0,"dev")
from d1 import *
import cosformer.ops.fused as F
from cosformer.ops.problem import basis
C0=(8,16,4096,64); f=floor(C0)
q,k,v=(torch.randn(*C0,device="cuda",dtype=torch.bfloat16) for _ in range(3))
def seg(n):
    def g(programs,length,chunk,wanted=264): return -(-length//(n*chunk))*chunk
    return g
def attempt(name,fn):
    try: t=graph_time(fn,10); print(name,"%.3f ms %.2fx"%(t,t/f),flush=True)
    except Exception as e: print(name,"FAIL",type(e).__name__,str(e)[:120],flush=True)
def setup(C,BN,w,s,post=False,mx=None,n=1):
    F.choose_tiles=lambda a,b,d:F.Tiles(C,BN,w,s); F.POST=post; F.MAXNREG=mx; F.segment_length=seg(n)
out=torch.empty_like(q); tot=torch.empty(8,16,4096,device="cuda")
for R,wt in ((2,"cosine"),(1,"plain")):
    ps=basis(torch.arange(4096,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-4,dtype=torch.float64,device="cuda"),wt,torch.float32)
    for rule in ("clamp","none"):
        for relu in (True,False):
            for w,s in ((4,2),(8,3),(4,3)):
                setup(64,64,w,s)
                P=F._Pass(q,None,None,ps,ps,None); x,y,z=F._Rows(q,1,relu),F._Rows(k,1,relu),F._Rows(v)
                attempt(f"R{R} {rule} relu{relu} w{w} s{s}",lambda:P.launch(x,y,z,causal=True,rows=4096,out=out,total=tot,rule=rule,eps=1e-6))
ps=basis(torch.arange(4096,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-4,dtype=torch.float64,device="cuda"),"cosine",torch.float32)
for (C,BN,w,s,n) in [(64,64,4,2,2),(64,64,4,2,4),(64,64,8,3,2),(64,64,8,2,4),(128,64,8,2,4),(64,64,4,3,4),(128,64,4,2,2),(64,64,4,3,2)]:
    setup(C,BN,w,s,n=n)
    P=F._Pass(q,None,None,ps,ps,None); y,z=F._Rows(k,1,True),F._Rows(v)
    st=P.empty_states(n,y,z,turned=False,sums=True)
    for rule in ("clamp","none"): attempt(f"gather {rule} C{C} w{w} s{s} seg{n}",lambda:P.launch(None,y,z,causal=True,rows=4096//n,last=st,rule=rule,eps=1e-6))
for (C,BN,w,s,n) in [(64,64,4,2,8),(64,64,4,2,4),(64,64,4,3,8),(64,64,4,1,8),(128,64,4,2,4),(128,64,8,2,8),(128,64,8,2,4),(64,64,8,2,8),(128,64,4,1,8)]:
    setup(C,BN,w,s,n=n)
    P=F._Pass(q,None,None,ps,ps,None); x,y,z=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v)
    st=torch.rand(8,16,1,2,64,65,device="cuda")
    for rule in ("clamp","none"): attempt(f"read {rule} C{C} w{w} s{s} seg{n}",lambda:P.launch(x,y,z,causal=False,write=False,rows=4096//n,first=st,out=out,total=tot,rule=rule,eps=1e-6))
