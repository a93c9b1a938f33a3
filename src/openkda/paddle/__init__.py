"""openkda for PaddlePaddle: layers in `openkda.paddle.nn`, weights shared with torch in `openkda.paddle.checkpoint`.

The operators need nothing of this: `openkda.chunk_kda` and its like take Paddle tensors as they are.
"""
