"""Credits: the log and its signed heads, receipts, plausibility, the leaderboard, exports."""
