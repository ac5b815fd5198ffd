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
