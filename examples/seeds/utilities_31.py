from unspool import PhrasalConstraint

constraint = PhrasalConstraint([5, 6, 7])
completed = False
while not completed:
    _, completed, _ = constraint.update(constraint.advance())
