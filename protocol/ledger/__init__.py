"""The ledger of credits: what is written, by which rule, and what it does to accounts. Without a clock, disk or socket.

Read in this order: `credits` (the credits of a certificate), `entries` (the bytes of the log), and `void_orders` (the
owner's orders that void an update). Then read `state` (the state machine that makes and checks entries), `statements`
(signed tree heads, receipts, bindings), and `audit` (the checks that anybody can make).
"""
