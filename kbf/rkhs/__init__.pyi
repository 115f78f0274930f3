from kbf.rkhs import (
    conditional_means as conditional_means,
    embeddings as embeddings,
    features as features,
    kernels as kernels,
    linalg as linalg,
    ratios as ratios,
    rules as rules,
    weights as weights,
)
