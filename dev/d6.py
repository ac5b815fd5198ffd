import sys; sys.path.insert(0,"dev")
from base import *
def suite(shape,configs,what):
    global f
    B,H,T,D=shape; fl=floor(shape)
    q,k,v,g=(torch.randn(*shape,device="cuda",dtype=torch.bfloat16) for _ in range(4)); out=torch.empty_like(q); tot=torch.rand(B,H,T,device="cuda")
    ps=basis(torch.arange(T,dtype=torch.float64,device="cuda")[None],torch.full((1,1),1e-5,dtype=torch.float64,device="cuda"),"cosine",torch.float32)
    for (C,BN,w,s,n) in configs:
        setup(C,BN,w,s,n=n)
        P=F._Pass(q,None,None,ps,ps,None); Q,K,V,G=F._Rows(q,1,True),F._Rows(k,1,True),F._Rows(v),F._Rows(g)
        rows=-(-T//(n*C))*C
        st=P.empty_states(n,K,V,turned=False,sums=True)
        sc,de,dl=P.prepare(g,out,tot,"clamp",1e-6)
        calls=dict(fwd=lambda:P.launch(Q,K,V,causal=True,rows=rows,out=out,total=tot,rule="clamp",eps=1e-6,first=st),
          dq=lambda:P.launch(G,V,K,causal=True,turned=True,out=out,rows=rows,scaled="x",column_at="reader",scale=sc,column=de,deltas=dl,gate=q,gated="relu",first=st),
          dk=lambda:P.launch(V,G,Q,causal=True,reverse=True,turned=True,out=out,rows=rows,scaled="y",column_at="writer",scale=sc,column=de,deltas=dl,gate=k,gated="relu",first=st),
          dv=lambda:P.launch(K,Q,G,causal=True,reverse=True,out=out,rows=rows,scaled="z",scale=sc,first=st),
          gather=lambda:P.launch(None,K,V,causal=True,rows=rows,last=st,rule="clamp",eps=1e-6),
          gather_dk=lambda:P.launch(None,G,Q,causal=True,reverse=True,turned=True,rows=rows,last=st,column_at="writer",column=de,deltas=dl,scaled="y",scale=sc),
          read=lambda:P.launch(Q,K,V,causal=False,write=False,rows=rows,first=st,out=out,total=tot,rule="clamp",eps=1e-6),
          sums=lambda:(P._sums.clear(),P._added(K,ps,None,C,hidden=False)))
        r=[]
        for name in what:
            try: t=graph_time(calls[name],8); r.append("%s %.2fx"%(name,t/fl))
            except Exception as e: r.append(name+" FAIL "+str(e)[:60])
        print(shape,f"C{C} BN{BN} w{w} s{s} n{n}:",*r,flush=True)
S=(8,16,4096,64)
suite(S,[(64,64,4,2,1)],["sums"]); suite(S,[(128,64,8,2,1)],["sums"])
suite(S,[(64,64,4,2,2),(64,64,4,3,2),(128,64,4,2,2),(128,64,8,2,2)],["fwd","dq","dk","dv","gather","gather_dk"])
suite(S,[(64,64,4,3,8),(128,64,4,2,8),(64,64,4,2,16)],["read"])
D=(2,8,16384,128)
suite(D,[(64,64,8,2,8),(64,64,8,1,8),(64,64,4,1,8),(32,64,4,2,8),(32,64,8,2,8)],["fwd","dq","dk","dv","gather"])
suite((1,16,65536,64),[(64,64,4,2,16),(128,64,8,2,16),(64,64,4,2,8),(128,64,8,2,8)],["fwd","dq","dk","dv","gather","gather_dk"])
