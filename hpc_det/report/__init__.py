"""The report of an experiment: one HTML page with everything in it.

facts       what the report shows, as plain data: trials, rungs, profiles, configuration
spans       how a trial spent its time, and its goodput
importance  how much each hyperparameter explains of the metric
page        the facts as a page: page.html.j2 with page.css and page.js inside, and the pictures
pictures    SVG of facts: curves, hyperparameters, rungs, time lines
"""
