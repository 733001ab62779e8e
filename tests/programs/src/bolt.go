// A bbolt database, each transaction committed before its number is printed; with "check" as the second
// word, how many are there, the first of them without a gap.
package main

import (
	"encoding/binary"
	"fmt"
	"os"

	bolt "go.etcd.io/bbolt"
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	db, err := bolt.Open(os.Args[1], 0o644, nil)
	must(err)
	key := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	if len(os.Args) > 2 {
		must(db.View(func(tx *bolt.Tx) error {
			for err := range tx.Check() {
				return err
			}
			n := uint64(0)
			must(tx.Bucket([]byte("b")).ForEach(func(k, v []byte) error {
				n++
				if binary.BigEndian.Uint64(k) != n || len(v) != int(n%2000) {
					return fmt.Errorf("%d is not as it was put", n)
				}
				return nil
			}))
			fmt.Println(n)
			return nil
		}))
		return
	}
	for n := uint64(1); ; n++ {
		must(db.Update(func(tx *bolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists([]byte("b"))
			if err != nil {
				return err
			}
			return b.Put(key(n), make([]byte, n%2000))
		}))
		fmt.Println(n)
	}
}
