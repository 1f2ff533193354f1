"""python read.py TRIAL: print the outputs in the folder of a trial as CSV, in the order of the data set."""

import csv
import sys

from hpc_det.pytorch import Outputs

table = csv.writer(sys.stdout, lineterminator="\n")
table.writerow(["record", "digit", "probability"])
for number, output in Outputs(sys.argv[1]):
    table.writerow([number, int(output["digit"]), f"{float(output['probability']):.4f}"])
