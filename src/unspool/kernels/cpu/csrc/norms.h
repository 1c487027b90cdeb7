/* Norms, activations, and vectors of fewer numbers than lanes. Included by kernels.c. */
#ifndef UNSPOOL_NORMS_H
#define UNSPOOL_NORMS_H

static void normalise(const us_norm *norm, const float *x, int32_t n, float *y) {
    vec squares = fill(0), total = fill(0);
    int32_t i = 0;
    if (norm->kind == US_COPY) {
        if (y != x) memcpy(y, x, sizeof(float) * (size_t)n);
        return;
    }
    float mean = 0, square = 0;
    if (norm->kind == US_LAYER) {
        for (; i + LANES <= n; i += LANES) total += load(x + i);
        mean = sum(total);
        for (; i < n; i++) mean += x[i];
        mean /= (float)n;
    }
    for (i = 0; i + LANES <= n; i += LANES) {
        vec v = load(x + i) - mean;
        squares += v * v;
    }
    square = sum(squares);
    for (; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(square / (float)n + norm->eps);
    for (i = 0; i + LANES <= n; i += LANES) {
        vec v = (load(x + i) - mean) * scale;
        if (norm->weight) v *= load(norm->weight + i);
        if (norm->bias) v += load(norm->bias + i);
        store(y + i, v);
    }
    for (; i < n; i++) {
        float v = (x[i] - mean) * scale;
        if (norm->weight) v *= norm->weight[i];
        y[i] = norm->bias ? v + norm->bias[i] : v;
    }
}

INLINE vec activate(int32_t kind, vec x) {
    switch (kind) {
    case US_SILU: return x * sigmoid(x);
    case US_GELU_TANH: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case US_RELU: return larger(x, fill(0));
    case US_RELU2: {
        const vec kept = larger(x, fill(0));
        return kept * kept;
    }
    default: {
        const vec tail = normal_tail(magnitude(x));
        return x * choose(x < fill(0), tail, 1.0f - tail);
    }
    }
}

/* A few numbers at the end of a row, as a whole vector. */
INLINE vec load_some(const float *p, int n) {
    if (n == LANES) return load(p);
    float some[LANES] = {0};
    memcpy(some, p, sizeof(float) * (size_t)n);
    return load(some);
}
INLINE void store_some(float *p, vec v, int n) {
    if (n == LANES) {
        store(p, v);
        return;
    }
    float some[LANES];
    store(some, v);
    memcpy(p, some, sizeof(float) * (size_t)n);
}

#endif
