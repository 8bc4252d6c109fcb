"""The ledger of credits: what is written, by which rule, and what it does to accounts. Without a clock, disk or socket.

Read in this order: `credits` (what a certificate earns whom), `entries` (what is written down, as bytes), `verdicts`
(the owner's word that an update earns nothing), `books` (the state machine that makes entries and checks them).
"""
