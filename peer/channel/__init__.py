"""The channel between a node and its trainer: messages, their lines, and both ends.

Small typed messages travel as lines over an inherited socket pair; tensors and blobs go through files that the messages
name. Nothing here imports torch, and nothing here knows what the messages lead to: that is `peer.training`'s and the
node's affair.
"""

from peer.channel.link import TrainerExit, TrainerLink
from peer.channel.messages import (
    SAVE_SECONDS,
    Applied,
    Apply,
    Choice,
    Failed,
    FromTrainer,
    Load,
    MakeUpdate,
    Memory,
    Note,
    NothingDone,
    Orders,
    Progress,
    Ready,
    RoundUpdates,
    Save,
    Saved,
    Start,
    Stop,
    Stopped,
    TimeShares,
    ToTrainer,
    UpdateFile,
    UpdateMade,
)
from peer.channel.trainer_end import TrainerEnd

__all__ = [
    "SAVE_SECONDS",
    "Applied",
    "Apply",
    "Choice",
    "Failed",
    "FromTrainer",
    "Load",
    "MakeUpdate",
    "Memory",
    "Note",
    "NothingDone",
    "Orders",
    "Progress",
    "Ready",
    "RoundUpdates",
    "Save",
    "Saved",
    "Start",
    "Stop",
    "Stopped",
    "TimeShares",
    "ToTrainer",
    "TrainerEnd",
    "TrainerExit",
    "TrainerLink",
    "UpdateFile",
    "UpdateMade",
]
