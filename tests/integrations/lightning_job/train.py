"""The training of test_lightning as the script of a job; at batch 8 the first attempt waits for a stop."""

import json

from tests.integrations.lightning_training import train

print("RESULT", json.dumps(train({"waits_at": 8})), flush=True)
