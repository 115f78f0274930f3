from kbf.rkhs import (
    conditional_means as conditional_means,
    conditional_operators as conditional_operators,
    embeddings as embeddings,
    features as features,
    hypothesis_tests as hypothesis_tests,
    kernels as kernels,
    linalg as linalg,
    posterior_regularisation as posterior_regularisation,
    ratios as ratios,
    rules as rules,
    sample_ratios as sample_ratios,
    weights as weights,
)
