import sys; sys.path.insert(0,"dev")
import torch, cosformer.ops.fused as F
from cosformer.ops.problem import basis
q,k,v=(torch.randn(1,2,512,64,device="cuda",dtype=torch.bfloat16) for _ in range(3))
out=torch.empty_like(q); tot=torch.empty(1,2,512,device="cuda")
ps=basis(torch.arange(512,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-4,dtype=torch.float64,device="cuda"),"cosine",torch.float32)
F.choose_tiles=lambda a,b,d:F.Tiles(64,32,4,2)
P=F._Pass(q,None,None,ps,ps,None); x,y,z=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v)
P.launch(x,y,z,causal=True,rows=512,out=out,total=tot,rule="none",eps=1e-6); torch.cuda.synchronize(); print("ran", out.float().norm())
