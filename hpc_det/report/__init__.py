"""The report of an experiment, as one HTML page or as JSON.

facts       the content of the report as plain data: trials, rungs, profiles, configuration
spans       how a trial spent its time, and its goodput
importance  the share of the metric that each hyperparameter explains
page        the facts as a page: page.html.j2 with page.css and page.js inlined, and the pictures
pictures    SVG pictures of the facts: curves, hyperparameters, rungs, time lines
"""
