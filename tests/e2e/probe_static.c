/* A program that no library is put before: it is linked statically. */
#include <stdio.h>

int main(void)
{
    puts("unguarded");
    return 0;
}
