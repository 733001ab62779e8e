/* What mimalloc's tests take from its header of this name. */
#define MI_ALIGNMENT_MAX ((size_t)1 << 20) /* the largest of a persistent heap; theirs is 16 MiB */
