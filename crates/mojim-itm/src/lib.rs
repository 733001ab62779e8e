//! libmojim_itm.so: the published transactional-memory ABI, as `gcc -fgnu-tm` calls it.
