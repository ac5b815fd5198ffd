import sys; sys.path.insert(0,"dev")
from base import *
ps=basis(torch.arange(4096,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-4,dtype=torch.float64,device="cuda"),"cosine",torch.float32)
def one(C,BN,w,s,mx=None,rule="clamp",post=False,name=""):
    setup(C,BN,w,s,post,mx)
    P=F._Pass(q,None,None,ps,ps,None); x,y,z=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v)
    attempt(f"{name} {rule} C{C} BN{BN} w{w} s{s} mx{mx} post{post}",lambda:P.launch(x,y,z,causal=True,rows=4096,out=out,total=tot,rule=rule,eps=1e-6))
for rule in ("clamp","none"):
    for a in ((64,64,4,2),(64,64,4,3),(64,64,8,2),(64,64,8,3),(64,64,8,4),(64,32,4,2),(128,64,8,2),(32,64,4,3)): one(*a,rule=rule)
one(64,64,8,3,post=True); one(64,64,4,3,post=True)
setup(64,64,4,3)
g=torch.randn_like(out); sc=torch.rand_like(tot); de=torch.randn_like(tot)
for w,s in ((4,2),(4,3),(8,2),(8,3)):
    setup(64,64,w,s)
    P=F._Pass(q,None,None,ps,ps,None); Q,K,V,G=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v),F._Rows(g)
    attempt(f"dq w{w} s{s}",lambda:P.launch(G,V,K,causal=True,turned=True,out=out,rows=4096,scaled="x",column_at="reader",scale=sc,column=de,gate=q,gated="relu"))
    attempt(f"dk w{w} s{s}",lambda:P.launch(V,G,Q,causal=True,reverse=True,turned=True,out=out,rows=4096,scaled="y",column_at="writer",scale=sc,column=de,gate=k,gated="relu"))
    attempt(f"dv w{w} s{s}",lambda:P.launch(K,Q,G,causal=True,reverse=True,out=out,rows=4096,scaled="z",scale=sc))
attempt("prepare",lambda:F._prepare(g,out,tot,"clamp",1e-6))
