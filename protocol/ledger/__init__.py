"""Credits: what each peer has earned, from the chain alone. Without a clock, disk or socket.

Read in this order: `credits` (the credits of a certificate), `fold` (balances over the chain), `statements` (signed
receipts and bindings), and `audit` (the comparison with what a coordinator says). `credit_text` writes them for people.
"""
