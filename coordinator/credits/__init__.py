"""Credits: the log, receipts, plausibility, the leaderboard, exports."""
