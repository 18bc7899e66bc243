"""The numbers of samples that scripts and tests share."""

NUM_SAMPLES, BATCH_SIZE = 192, 8
