"""What several packages use, and nothing that knows of tasks and gradients.

files.py          files that are written completely or not at all; locks; hashes
hints.py          what messages share; the log as plain lines
plugins.py        rules, recipes and writers of your own, by module or file
devices.py        index tensors and Triton kernels for a GPU
native.py         kernels in C++ for a CPU, built on request (native.cpp)
cuda_graph.py     a step recorded as a CUDA graph and replayed
torch_backend.py  what torch.compile is told of the engine's backend
local_server.py   what pages served on this machine share
"""
