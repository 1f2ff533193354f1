"""In the user's program: who is asked, and who goes on where a gang is lost.

trainer, fitting   what a user asks; arguments checks, opening opens
nodes              agents that have come; gang: ranks that are formed over them, which `ranks` watches
elastic            another gang where one is lost; failures and leaving say why
in_process         rank 0 in the driver itself
run_folder, results, saved, reports: what comes of it
"""
