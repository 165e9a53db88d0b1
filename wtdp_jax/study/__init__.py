"""The study: is weight tying still beneficial under DP-SGD? A grid of runs, and what their folders tell.

`arms` says what is compared; `grid`, `presets` and `cells` say which runs that makes; `conduct` does them in
`workers`; `folder` reads a study back; `evidence`, `contrasts` and `claims` turn it into the tables, verdicts
and figures of `document`.
"""
