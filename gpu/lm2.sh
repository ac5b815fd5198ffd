set -u
T0=$(date +%s)
export PYTHONPATH=$PWD/carry/py:$PWD PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=2 OMP_NUM_THREADS=1
git log --oneline -1; ls /root/runs-lm 2>/dev/null | wc -l
pgrep -f mps-control >/dev/null || nvidia-cuda-mps-control -d
left() { python3 -c "import time; print(round(($1 - (time.time() - $T0)) / 60, 2))"; }
cp carry/gpu/rows.jsonl $OUT/study-lm.jsonl
(for e in try-g4s try-win256 try-g4h try-gexp try-g4 try-win512 try-conv-input try-glong try-bias-0.5 try-win128-2 try-gsq try-bias-1 try-g16s; do echo $e; done | xargs -P 5 -I{} sh -c 'timeout 500 python3 carry/gpu/directions.py {} 0.003 /root/dirs carry/data > /root/dir-{}.txt 2>&1; grep -h DONE /root/dir-{}.txt >> $OUT/directions.txt || (echo FAILED {}; tail -3 /root/dir-{}.txt) >> $OUT/directions.txt') &
B="softmax softmax-conv softmax-norm-sigmoid cosformer cosformer-1-head cosformer-conv cosformer-norm-gate multiscale multiscale-norm-sigmoid multiscale-conv gated gated-norm-sigmoid hybrid-6 hybrid-6-gated-norm-sigmoid retention retention-conv-gate gated-delta-conv-norm-sigmoid gated-delta-relu-conv-norm-sigmoid"
A="multiscale-no-cosine multiscale-2-heads multiscale-8-heads multiscale-rotary gated-norm-sigmoid-2-heads gated-norm-sigmoid-keys-of-128 multiscale-gate gated-conv local-multiscale hybrid-6-last hybrid-3 multiscale-qk-norm gated-gate multiscale-conv-input multiscale-horizon-1024 gated-delta-conv-gate local-multiscale-conv-gate"
S="--data carry/data --out /root/runs-lm --rows $OUT/study-lm.jsonl"
timeout -k 20 570 python3 -m cosformer study lm --only $B --jobs 10 --minutes $(left 530) $S 2>&1 | tee $OUT/logB | grep -v "run,.*wait" | cut -c1-150
python3 -c "import sys; sys.exit($(left 530) < 1)" && timeout -k 20 500 python3 -m cosformer study lm --only $A --rates 3e-3 --jobs 14 --minutes $(left 550) $S 2>&1 | tee $OUT/logA | grep -v "run,.*wait" | cut -c1-150
cat $OUT/directions.txt; wc -l $OUT/study-lm.jsonl
