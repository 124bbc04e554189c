"""What can only be known on a real GPU: predictions held to measurements there. Started by ``scripts/gpu_check.py``.

Everything also runs small on a CPU, so that it still works on the day when there is a GPU.
"""
