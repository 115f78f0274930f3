"""One of the processes of `test_distributed`: python shared_job.py DIRECTORY, with the environment
that torch.distributed reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

if __name__ == "__main__":
    from test_distributed import recordings, results

    from kbf.runtime.distributed import all_sum, gather

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = recordings()
    told = results(whole[:2] if rank == 0 else whole[2:], all_sum, rank)
    told["gathered"] = gather(torch.tensor([[0.0], [1.0]]) if rank == 0 else torch.tensor([[10.0]]))
    torch.save(told, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()
