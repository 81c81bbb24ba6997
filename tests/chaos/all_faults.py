"""All faults that are tried, and how often: in the short version, which runs with the other tests, and in the long one."""

import chaos_checkpoints
import chaos_folders
import chaos_outages
import chaos_relays
import chaos_runs
import chaos_samplers
import chaos_sandbox
import chaos_services
import chaos_weights
from chaos_table import Fault

# name: (fault, times in the short version, times in the long one); 0 leaves it out. tests/train/test_whole_runs.py kills whole runs too.
FAULTS: dict[str, tuple[Fault, int, int]] = {
    "sampler killed": (chaos_samplers.killed, 2, 40),
    "sampler hung": (chaos_samplers.hung, 2, 40),
    "sampler answers garbage": (chaos_samplers.garbage, 3, 60),
    "weights behind a wrong label": (chaos_samplers.mislabelled, 3, 60),
    "relay of a chain killed, hung or lying": (chaos_relays.broken_chain, 3, 30),
    "version before damaged on a relay": (chaos_relays.damaged_before, 2, 30),
    "canary sabotage": (chaos_weights.sabotaged, 7, 140),
    "clock jumps by days": (chaos_samplers.clock_jump, 2, 40),
    "learner killed at a random moment": (chaos_runs.learner_killed, 0, 3),
    "SIGTERM at a random moment": (chaos_folders.preempted, 0, 20),
    "two launches in one folder": (chaos_folders.launched_twice, 0, 5),
    "resumed with another setting": (chaos_folders.resumed_with_other_settings, 0, 12),
    "all samplers fail at once": (chaos_outages.outage(chaos_outages.Fleet), 0, 6),
    "reward service falls": (chaos_outages.outage(chaos_outages.reward_service), 0, 3),
    "judge falls": (chaos_outages.outage(chaos_outages.judge), 0, 3),
    "disk fills during a run": (chaos_outages.outage(chaos_outages.Disk), 0, 3),
    "learner killed while it saves": (chaos_checkpoints.killed_while_saving, 2, 8),
    "disk full during a save": (chaos_checkpoints.disk_full, 2, 20),
    "bit of a checkpoint flipped": (chaos_checkpoints.flipped_bits, 30, 600),
    "publication folder deleted": (chaos_checkpoints.folder_deleted, 2, 40),
    "sandbox attacked": (chaos_sandbox.attacks, 2, 1000),
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
