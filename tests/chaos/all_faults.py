"""All faults that are tried, and how often: in the short version, which runs with the other tests, and in the long one."""

import chaos_checkpoints
import chaos_folders
import chaos_runs
import chaos_samplers
import chaos_services
from chaos_table import Fault

# name: (fault, times in the short version, times in the long one); 0 leaves it out. tests/train/test_whole_runs.py kills whole runs too.
FAULTS: dict[str, tuple[Fault, int, int]] = {
    "sampler killed": (chaos_samplers.killed, 2, 40),
    "sampler hung": (chaos_samplers.hung, 2, 40),
    "sampler answers garbage": (chaos_samplers.garbage, 3, 60),
    "clock jumps by days": (chaos_samplers.clock_jump, 2, 40),
    "learner killed at a random moment": (chaos_runs.learner_killed, 0, 3),
    "SIGTERM at a random moment": (chaos_folders.preempted, 0, 20),
    "two launches in one folder": (chaos_folders.launched_twice, 0, 5),
    "resumed with another setting": (chaos_folders.resumed_with_other_settings, 0, 12),
    "learner killed while it saves": (chaos_checkpoints.killed_while_saving, 2, 8),
    "disk full during a save": (chaos_checkpoints.disk_full, 2, 20),
    "bit of a checkpoint flipped": (chaos_checkpoints.flipped_bits, 30, 600),
    "publication folder deleted": (chaos_checkpoints.folder_deleted, 2, 40),
    "reward process killed": (chaos_runs.reward_worker_killed, 2, 20),
    "micro-batch out of memory": (chaos_runs.out_of_memory, 1, 5),
    **{f"malformed requests: {name}": (chaos_services.fuzzed(name), 300, 10_000) for name in chaos_services.SERVICES},
    **{
        f"wrong token: {name}": (chaos_services.wrong_token(name), 20, 300)
        for name in chaos_services.SERVICES
        if name != "viewer"
    },
    **{f"slow loris: {name}": (chaos_services.slow_loris(name), 12, 200) for name in chaos_services.SERVICES},
}
