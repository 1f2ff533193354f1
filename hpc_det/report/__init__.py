"""The report of experiments, as one HTML page or as JSON.

facts       the content of the report as plain data: trials, rungs, profiles, configuration
spans       how a trial spent its time, and its goodput
importance  the share of the metric that each hyperparameter explains
page        the facts of one experiment as a page: page.html.j2
comparison  the facts of several experiments as a page: comparison.html.j2
panels      panels of curves, with a line for each trial
document    a template with page.css and page.js inlined, as one file
pictures    SVG pictures of the facts: curves, hyperparameters, rungs, time lines
"""
