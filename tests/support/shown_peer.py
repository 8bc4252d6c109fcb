"""A peer as its volunteer sees it."""

from __future__ import annotations

from cairn.peer_view import PeerEarnings, PeerView
from peer.node.snapshot import Snapshot
from protocol.ids import Round
from protocol.rounds.update_fate import UpdateFate

NODE = Snapshot(
    run="sotu", name="ada", peer="ab" * 32, phase="training", round=12, head="c" * 64, state="d" * 64, state_round=12,
    accepted_tokens=3_000_000, total_tokens=20_000_000, round_tokens=14_336, target_tokens=24_576, loss=5.1234,
    tokens_per_second=1280.0, members=3, bytes_up=31_200_000, bytes_down=155_000_000, device="CPU x86_64",
    own_updates=9, missed_updates=1, exchange_seconds={}, exchange_rounds=[], trainer_restarts=0, finished="",
    mfu=0.41, swarm_tokens_per_second=400.0, round_seconds_left=95.0, up_per_second=1_200_000.0,
    down_per_second=3_400_000.0, last_update=UpdateFate(Round(11), True),
)  # fmt: skip
PAGE = f"https://run.example.org/#peer/{'ab' * 32}"
VIEW = PeerView(NODE, PeerEarnings(20_000_000, 10_500_000, 8), PAGE)
