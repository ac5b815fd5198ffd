import sys; sys.path.insert(0,"dev")
from base import *
ps=basis(torch.arange(4096,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-4,dtype=torch.float64,device="cuda"),"cosine",torch.float32)
def one(C,BN,w,s,mx=None,rule="clamp",post=False,name=""):
    setup(C,BN,w,s,post,mx)
    P=F._Pass(q,None,None,ps,ps,None); x,y,z=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v)
    attempt(f"{name} {rule} C{C} BN{BN} w{w} s{s} mx{mx} post{post}",lambda:P.launch(x,y,z,causal=True,rows=4096,out=out,total=tot,rule=rule,eps=1e-6))
for a in ((64,64,4,2),(64,64,4,3),(128,64,8,2),(64,64,8,3),(64,64,4,4)): one(*a)
one(64,64,4,2,post=True)
g=torch.randn_like(out)
P=F._Pass(q,None,None,ps,ps,None); K=F._Rows(k,1,True)
def sm():
    P._sums.clear(); P._added(K,ps,None,64,hidden=False)
attempt("sums",sm)
for C,w,s in ((64,4,2),(64,4,3),(64,8,3),(128,8,2)):
    setup(C,64,w,s)
    P=F._Pass(q,None,None,ps,ps,None); Q,K,V,G=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v),F._Rows(g)
    sc,de,dl=P.prepare(g,out,tot,"clamp",1e-6)
    attempt(f"dq C{C} w{w} s{s}",lambda:P.launch(G,V,K,causal=True,turned=True,out=out,rows=4096,scaled="x",column_at="reader",scale=sc,column=de,deltas=dl,gate=q,gated="relu"))
    attempt(f"dk C{C} w{w} s{s}",lambda:P.launch(V,G,Q,causal=True,reverse=True,turned=True,out=out,rows=4096,scaled="y",column_at="writer",scale=sc,column=de,deltas=dl,gate=k,gated="relu"))
    attempt(f"dv C{C} w{w} s{s}",lambda:P.launch(K,Q,G,causal=True,reverse=True,out=out,rows=4096,scaled="z",scale=sc))
attempt("prepare",lambda:P.prepare(g,out,tot,"clamp",1e-6))
