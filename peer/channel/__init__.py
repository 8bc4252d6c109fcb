"""The channel between a node and its trainer: messages, their text lines, and both ends.

Small typed messages travel as lines of text over an inherited socket pair. Tensors and blobs travel as files that the
messages name. Nothing here imports torch, and nothing here acts on a message: `peer.training` and the node do.
"""

from peer.channel.link import TrainerExit, TrainerLink
from peer.channel.messages import (
    SAVE_SECONDS,
    Applied,
    Apply,
    Choice,
    DataUnavailable,
    Failed,
    FromTrainer,
    Load,
    MakeUpdate,
    Memory,
    MomentForm,
    Note,
    NothingDone,
    Orders,
    Progress,
    Ready,
    RoundUpdates,
    Start,
    Stop,
    Stopped,
    TimeShares,
    ToTrainer,
    UpdateFile,
    UpdateMade,
    WriteCheckpoint,
)
from peer.channel.trainer_end import TrainerEnd
