from unspool import ConstraintListState, DisjunctiveConstraint, PhrasalConstraint

constraint = DisjunctiveConstraint([[5, 6], [7, 8, 9]])
completed = False
while not completed:
    _, completed, _ = constraint.update(constraint.advance()[0])

state = ConstraintListState([PhrasalConstraint([5, 6]), DisjunctiveConstraint([[7, 8], [9]])])
while not state.completed:
    state.add(state.advance()[0])
