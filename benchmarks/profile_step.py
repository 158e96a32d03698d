import cProfile, pstats, sys, torch
from transformer import *
import gradvac, warnings
warnings.simplefilter("ignore")
size, T = sys.argv[1], int(sys.argv[2]); dev=sys.argv[3]
model=Transformer(SIZES[size]).to(dev); b=make_batch(SIZES[size],T,dev)
al=gradvac.Aligner(model,[f"t{i}" for i in range(T)],gradvac.GradVac(),component,engine="one_backward")
def step():
    for p in model.parameters(): p.grad=None
    with torch.autocast(dev,torch.bfloat16,enabled=dev=="cuda"): l=row_losses(model,b[0],b[1])
    al.backward(l,b[2])
def sync():
    if dev=="cuda": torch.cuda.synchronize()
for _ in range(4): step()
sync()
import threading
prof=cProfile.Profile()
threading.setprofile(None)
prof.enable()
for _ in range(5): step()
sync(); prof.disable()
pstats.Stats(prof).sort_stats("tottime").print_stats(28)
if dev=="cuda":
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as pr:
        step(); sync()
    print(pr.key_averages().table(sort_by="self_cuda_time_total",row_limit=32,max_name_column_width=60))
    print(pr.key_averages().table(sort_by="self_cpu_time_total",row_limit=25,max_name_column_width=60))
