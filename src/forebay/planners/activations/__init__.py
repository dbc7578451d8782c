"""What every op's output does between forward and backward, and every block's parameters beside it.

items      what may be done with what each op of a block makes, and what that costs
menu       the choices for a block that no other choice beats in every respect
groups     blocks that are alike, and what each choice for them costs every tier and lane
chain      all blocks together, as a linear programme: the bound that no plan beats, and how many blocks take
           which choice
rounding   which of the blocks that are alike takes which choice
choosing   from a problem to activation choices that fit, with the bench as the judge
swapping   more and more of them moved, in the order in which a byte spares the most computation
literature published planners, which decide in other ways
"""
