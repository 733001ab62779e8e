use std::path::Path;
fn main() {
    if mojim_bench::peers::maybe_run_peer() { return; }
    let a: Vec<String> = std::env::args().collect();
    if a.get(1).map(|s| s.as_str()) == Some("node") {
        let c = mojim::Config::load(Path::new(&a[3])).unwrap();
        let _n = mojim::node::Node::start(&c, &a[5], |t| eprintln!("{t}")).unwrap();
        loop { std::thread::park(); }
    }
    let g = |i: usize, d: usize| a.get(i).and_then(|s| s.parse().ok()).unwrap_or(d);
    let o = mojim_bench::sync::SyncOptions { sizes: a.get(1).map(|s| s.split(',').filter_map(|x| x.parse().ok()).collect()).unwrap_or_default(), rounds: g(2, 20), ops: g(3, 50), threads: g(4, 0), dir: Some("/work".into()), ..Default::default() };
    mojim_bench::sync::run(&o).unwrap();
}
